"""From gin files and bindings to a Config. Only this folder imports gin."""
