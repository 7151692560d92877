"""The audit, read: who changed what. It is written by `paramd_service.control.records`."""
