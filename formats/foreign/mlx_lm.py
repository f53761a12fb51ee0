"""mlx-lm prompt-cache files (`mlx_lm.models.cache.save_prompt_cache`)."""


def version_of(metadata: dict[str, str]) -> int | None:
    """The version of a prompt-cache file from its safetensors metadata: 2 (mlx-lm >= 0.32), 1 (before), None (not one).

    Version 2 flattens [user, classes, scalars] and its scalars begin with an empty string; version 1 flattens
    [state, user, classes], so that "2.0" is the class name of the first layer.
    """
    first = metadata.get("2.0")
    if first is None:
        return None
    if first == "":
        return 2 if "1.0" in metadata else None
    return 1 if any(key == "0.0" or key.startswith("0.0.") for key in metadata) else None
