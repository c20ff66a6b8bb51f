"""Train a DFlash drafter for any target: prompts, the target's own answers, training, evaluation.

    command                            the three stages in order
    answer_stage, prompts, answers     prompts in, the target's answers out
    turns, follow_ups                  later turns of a talk
    other_runs, held_out               answers of other runs; prompts that are not trained on
    train_stage, trainer, loss         from answers to weights, with checkpoints
    evaluate_stage, acceptance         accept length in the real decoding loop, the model card

Two published libraries train DFlash drafters, and neither fits here. speculators 0.9.0 takes its
features from a running vLLM server and writes a format of its own: its converter reads released
checkpoints but does not write them. specforge 0.2.0 pins torch 2.11, transformers 5.8.1 and SGLang
0.5.14, and captures features only through that SGLang, patched. Both need `datasets` and are more
than 20,000 lines long. A mask, a loss and a training loop are less code than an adapter would be,
and the model already exists as the tests' oracle.
"""
