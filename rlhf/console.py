"""Former location of rlhf.utils.console, kept for programs that import it."""

from rlhf.utils.console import quiet_libraries as quiet_libraries
