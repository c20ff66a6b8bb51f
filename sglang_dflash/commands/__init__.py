"""The `python -m sglang_dflash` commands, one module each. They use SGLang only through `glue`."""
