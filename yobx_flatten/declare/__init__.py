"""What users call to register classes: functions, the block, decorators, classes of other libraries."""
