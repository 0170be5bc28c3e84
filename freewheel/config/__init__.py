"""Configuration: options by name, layered from defaults, presets, files and flags into one Config."""
