"""The older name of rlhf.utils.console, which programs import."""

from rlhf.utils.console import quiet_libraries as quiet_libraries
