"""SGLang <-> sglang_dflash. Nothing outside this package imports SGLang.

By lifetime: the files here attach to SGLang (`plugin`, with every change in `changes` and every
name in `symbols/`). `startup/` checks arguments and sizes memory, `models/` lives as long as the
server, `step/` runs prefill and decode, `sampling/` serves what requests ask for within a step,
`after_step/` ends requests and counts. `programs/` runs SGLang for our commands, and `cpu/` holds
the stand-ins for what SGLang lacks without a GPU.
"""
