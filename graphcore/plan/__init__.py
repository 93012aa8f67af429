"""GraphPlan: a graph written down before it exists: checked, saved, then run or built."""
