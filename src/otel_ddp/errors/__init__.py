"""What a user may catch. Everything here is raised before the first step, never after it."""


class OtelDdpError(Exception):
    """The root of what this library raises."""


class ConfigError(OtelDdpError, ValueError):
    """A setting or an argument that cannot mean anything; the text says what was expected."""


class MissingDependency(OtelDdpError, ImportError):
    """Something was asked for by name that needs a package which is not installed."""
