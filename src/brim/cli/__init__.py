"""The command line: each verb parses, calls one function and shows the result."""
