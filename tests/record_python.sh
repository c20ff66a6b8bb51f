#!/bin/sh
# Stands in for Python in a start script: prints the environment and the words of the server that
# the script would become, each ended by a zero byte. Anything else is left to Python.
[ "$1" = -m ] || exec "$RECORDED_PYTHON" "$@"
env -0
printf '\0'
printf '%s\0' "$@"
