"""How the tiny models were made; see README.md beside this file. Needs PyTorch, which nothing else here does."""
