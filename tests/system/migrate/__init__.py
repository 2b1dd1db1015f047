"""Migrations, against real appliances."""
