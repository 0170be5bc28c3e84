"""Leave Freewheel behind: weights and a ten-line loader that needs only numpy and safetensors."""
