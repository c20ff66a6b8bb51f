"""SGLang without a GPU: all stand-ins for what it lacks there.

`path/` goes on PYTHONPATH (set by launch/cpu.sh and the environment of `make`) because SGLang
imports those names before it loads plug-ins; it turns CPU mode on. The plug-in installs the rest,
in CPU mode only: see `install`.
"""
