"""SGLang <-> sglang_dflash. Nothing outside this package imports SGLang.

In order of lifetime: the files here attach to SGLang (`plugin`, with every change in `changes`,
every name in `symbols/` and what differs between its releases in `seams/`). `startup/` checks
arguments and sizes memory, `models/` lives as long as the server, `step/` runs prefill and decode,
`sampling/` applies the requests' sampling parameters within a step, `after_step/` finishes requests
and keeps metrics. `programs/` runs SGLang for our commands, and `cpu/` holds the stand-ins for what
SGLang lacks without a GPU.
"""
