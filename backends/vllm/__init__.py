"""Hidden states with a vLLM server. Importing this, or anything in it, loads neither torch nor vllm."""
