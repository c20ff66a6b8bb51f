"""SGLang <-> sglang_dflash. Nothing outside this package imports SGLang."""
