#!/bin/sh
# Table 7: ViT-small, clean and corrupted. App. E.6 trains it.
. "$(dirname "$0")/common.sh"

sh referee/reproduce/appE6.sh
