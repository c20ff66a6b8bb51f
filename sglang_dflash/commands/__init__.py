"""`python -m sglang_dflash NAME`, one module each. They reach SGLang through `glue` only."""
