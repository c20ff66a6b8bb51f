"""DFlash speculative decoding for SGLang, as a plug-in."""

__version__ = "0.1.0"
