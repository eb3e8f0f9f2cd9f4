"""Environments of several turns: two forms of user classes, and the instances that play."""
