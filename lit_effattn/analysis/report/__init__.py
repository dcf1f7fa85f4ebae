"""The command `report`: one HTML page about runs."""
