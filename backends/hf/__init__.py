"""Hidden states with Hugging Face Transformers. Importing this loads no torch; `extractor`, `attention` and `capture` do."""
