"""All tests; a package so that suites can import `tests.support`."""
