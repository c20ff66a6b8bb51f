"""SGLang without a GPU: everything that stands in for what it lacks there, in one folder.

`path/` goes on Python's path (launch/cpu.sh does it, and the environment of `make`) because SGLang
imports those names before it loads plug-ins; it turns CPU mode on. The rest is installed by the
plug-in, in CPU mode only: see `install`.
"""
