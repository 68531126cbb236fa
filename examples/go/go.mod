module sluice-example

go 1.19
