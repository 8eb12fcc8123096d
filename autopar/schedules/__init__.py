"""Pipeline schedules as data: builders, checks, communication, the clock."""
