"""Loggers of log.loggers. Each module is named after its library and has a class `Logger`."""
