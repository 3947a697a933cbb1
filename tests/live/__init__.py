"""Tests that need real processes: a pool of live workers, a yardstick to measure against, and the scenarios."""
