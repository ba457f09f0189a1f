"""Objectives (one file each), schedules, the step and the epoch."""
