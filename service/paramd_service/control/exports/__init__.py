"""Exports as durable jobs: state machine, runner, schedules, REST documents."""
