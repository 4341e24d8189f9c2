"""The components as LaunchDaemons: property lists, launchctl, what an install makes, their logs."""
