"""Settings: what the user may say (`EngineArgs`), and the one frozen `EngineConfig` that everything else reads.

`resolve` is pure: the same settings, model and device give the same config. Nothing reads the environment later.
"""
