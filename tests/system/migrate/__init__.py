"""Moving house, against real appliances."""
