"""From one model's cache to another's: fitted maps, recomputation of a part, and what each is worth."""
