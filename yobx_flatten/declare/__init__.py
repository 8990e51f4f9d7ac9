"""What users call to register classes: functions, the context manager, decorators, classes of other libraries."""
