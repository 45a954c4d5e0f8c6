"""What the tests of this folder share: a cluster as kubectl sees it, a service, its clients and its nodes."""
