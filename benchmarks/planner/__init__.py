"""What the planner's parts cost, side by side in one run."""
