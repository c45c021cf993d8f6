"""The error of a setting that a training cannot have."""


class SettingUnavailableError(RuntimeError):
    """A training cannot have a setting; the message says which and why."""
