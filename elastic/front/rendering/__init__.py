"""From messages to tokens and back: tokenizers and templates, the renderers that use them, and what reads answers."""
