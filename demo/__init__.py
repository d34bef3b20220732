"""The demo: two tenants train three jobs at once over one small model, and the report says what came of it."""
