"""Commands about settings of the appliance, quotas, and addresses under names."""
