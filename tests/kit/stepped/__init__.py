"""The appliance's processes without processes: stepped by hand, on a test's clock."""
