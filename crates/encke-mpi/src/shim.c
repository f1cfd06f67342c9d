/* What bindings cannot express: macros, and the functions of ULFM where an MPI has them.
 *
 * Every function returns an MPI error code unless stated otherwise. Without ULFM its functions
 * return MPI_ERR_OTHER; callers check encke_mpi_ulfm, which then returns 0, before they call
 * them. */

#include <mpi.h>
#include <stdlib.h>

#if defined(OPEN_MPI)
#include <mpi-ext.h>
#endif

#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
#define ENCKE_ULFM 1
#else
#define ENCKE_ULFM 0
#endif

/* The class of an error code: 1 a process died, 2 the communicator was revoked, 3 a message was too
 * long, 0 anything else. */
int encke_mpi_class(int code)
{
    int class = MPI_ERR_OTHER;
    MPI_Error_class(code, &class);
#if ENCKE_ULFM
    if (class == MPIX_ERR_PROC_FAILED || class == MPIX_ERR_PROC_FAILED_PENDING)
        return 1;
    if (class == MPIX_ERR_REVOKED)
        return 2;
#endif
    return class == MPI_ERR_TRUNCATE ? 3 : 0;
}

/* Whether deaths of processes are reported and can be survived in this launch. */
int encke_mpi_ulfm(void)
{
#if ENCKE_ULFM
    int *value = NULL, found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPIX_FT, &value, &found);
    return found && value != NULL && *value;
#else
    return 0;
#endif
}

int encke_mpi_revoke(MPI_Comm comm)
{
#if ENCKE_ULFM
    return MPIX_Comm_revoke(comm);
#else
    (void)comm;
    return MPI_ERR_OTHER;
#endif
}

int encke_mpi_shrink(MPI_Comm comm, MPI_Comm *left)
{
#if ENCKE_ULFM
    return MPIX_Comm_shrink(comm, left);
#else
    (void)comm;
    (void)left;
    return MPI_ERR_OTHER;
#endif
}

int encke_mpi_iagree(MPI_Comm comm, int *flag, MPI_Request *request)
{
#if ENCKE_ULFM
    return MPIX_Comm_iagree(comm, flag, request);
#else
    (void)comm;
    (void)flag;
    (void)request;
    return MPI_ERR_OTHER;
#endif
}

/* The ranks in `of` of the members of `group`, in the group's order. */
static int translate(MPI_Group group, MPI_Comm of, int *ranks, int most, int *count)
{
    MPI_Group all;
    int size = 0;
    int code = MPI_Group_size(group, &size);
    if (code != MPI_SUCCESS)
        return code;
    if (size > most)
        size = most;
    *count = size;
    if (size == 0)
        return MPI_SUCCESS;
    int *own = malloc(sizeof(int) * (size_t)size);
    if (own == NULL)
        return MPI_ERR_OTHER;
    for (int i = 0; i < size; i++)
        own[i] = i;
    code = MPI_Comm_group(of, &all);
    if (code == MPI_SUCCESS) {
        code = MPI_Group_translate_ranks(group, size, own, all, ranks);
        MPI_Group_free(&all);
    }
    free(own);
    return code;
}

/* The ranks in `comm` of processes that are known to have died. */
int encke_mpi_failed(MPI_Comm comm, int *ranks, int most, int *count)
{
    *count = 0;
#if ENCKE_ULFM
    MPI_Group group;
    int code = MPIX_Comm_get_failed(comm, &group);
    if (code != MPI_SUCCESS)
        return code;
    code = translate(group, comm, ranks, most, count);
    MPI_Group_free(&group);
    return code;
#else
    (void)comm;
    (void)ranks;
    (void)most;
    return MPI_SUCCESS;
#endif
}

/* The ranks in `of` of the members of `part`, in the order of `part`. */
int encke_mpi_members(MPI_Comm part, MPI_Comm of, int *ranks, int most, int *count)
{
    MPI_Group group;
    int code = MPI_Comm_group(part, &group);
    if (code != MPI_SUCCESS)
        return code;
    code = translate(group, of, ranks, most, count);
    MPI_Group_free(&group);
    return code;
}
