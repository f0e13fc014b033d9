"""Pipeline parallelism: schedules as tables, one checker and one executor."""
