"""The programs that a user starts; tests import `launch.demo` and `launch.client`."""
