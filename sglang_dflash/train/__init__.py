"""Making a drafter for a target: prompts, the target's answers, training, evaluation, export.

Two published libraries train DFlash drafters, and neither fits here. speculators 0.9.0 takes its
features from a running vLLM server and writes a format of its own: its converter reads released
checkpoints but does not write them. specforge 0.2.0 pins torch 2.11, transformers 5.8.1 and SGLang
0.5.14, and captures features only through that SGLang, patched. Both need `datasets` and hold more
than 20,000 lines. What this package lacked, a mask, a loss and a loop, is smaller than an adapter
would be; the model is already here, as the oracle of the tests.
"""
