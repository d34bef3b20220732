"""Control plane of MARLaaS: schema, manager, storage, command line. Imports no torch."""
