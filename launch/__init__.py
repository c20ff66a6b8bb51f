"""User-facing programs; tests import `launch.demo` and `launch.client`."""
