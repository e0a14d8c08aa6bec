"""Single operators and copies, timed by themselves: what ``calibrate`` makes a profile of; never a model or a step."""
