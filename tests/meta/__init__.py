"""Tests of the suite itself: oracle, judge, strategies, devices and tools."""
