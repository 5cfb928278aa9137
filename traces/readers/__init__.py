"""One module per trace format, each with `read(reading)`: (time, request) in file order."""
