"""The appliance's settings and quotas: requests that read and change them."""
